"""No flag without a test that shows what it does: this table says where, and fails for a flag that nobody has put into it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.recipes.flux_dreambooth import Config

# Test file -> the flags whose effect it shows: a value, a file, a refusal.
SHOWN = {
    "test_config": "pretrained_model_name_or_path variant instance_data_dir output_dir instance_prompt num_train_epochs max_train_steps",
    "test_hub": "revision push_to_hub hub_model_id hub_token",
    "test_flux_dreambooth": """checkpointing_steps checkpoints_total_limit resume_from_checkpoint optimizer mixed_precision report_to cpu_fsdp
        gradient_accumulation_steps export_dtype""",
    "test_flags": """use_8bit_adam enable_npu_flash_attention allow_tf32 learning_rate scale_lr lr_scheduler lr_warmup_steps lr_num_cycles
        lr_power max_grad_norm adam_beta1 adam_beta2 adam_weight_decay adam_weight_decay_text_encoder adam_epsilon text_encoder_lr
        prodigy_beta3 prodigy_decouple prodigy_use_bias_correction prodigy_safeguard_warmup gradient_checkpointing offload seed
        guidance_scale max_sequence_length logging_dir final_validation_prompt skip_final_inference""",
    "test_flow_matching": "weighting_scheme logit_mean logit_std mode_scale",
    "test_lora": "rank lora_alpha lora_dropout lora_layers upcast_before_saving",
    "test_variants": "train_text_encoder use_ema ema_decay validation_prompt num_validation_images validation_epochs train_batch_size",
    "test_data_flags": """dataset_name dataset_config_name cache_dir image_column caption_column repeats skip_unreadable_images resolution
        center_crop random_flip image_interpolation_mode use_aspect_ratio_buckets aspect_ratio_buckets cache_latents
        dataloader_num_workers with_prior_preservation class_data_dir class_prompt num_class_images prior_loss_weight
        sample_batch_size prior_generation_precision""",
}


def test_every_flag_is_shown_somewhere() -> None:
    listed = [flag for flags in SHOWN.values() for flag in flags.split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == {field.name for field in fields(Config)}


@pytest.mark.parametrize("file", SHOWN)
def test_the_file_speaks_of_its_flags(file: str) -> None:
    text = Path(__file__).with_name(f"{file}.py").read_text()
    helper = (Path(__file__).parent.parent / "recipe_jobs.py").read_text()
    assert [flag for flag in SHOWN[file].split() if flag not in text and flag not in helper] == []
