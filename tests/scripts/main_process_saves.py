"""In the shape of the public diffusion trainers: everything but the training itself happens on the main process only.

It deletes before it saves, saves at every second step and so at the last one, validates and writes the final model on the main process,
and its hooks pop from `weights`. Deterministic given the seed: its noise is drawn from torch's generator at every step.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Denoiser(ModelMixin, ConfigMixin):
    _no_split_modules = ("Block",)

    @register_to_config
    def __init__(self, width=6, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def log_validation(model, accelerator, what):
    model.eval()
    with torch.no_grad():
        picture = model(torch.ones(1, 6))
    accelerator.print(f"{what}: {picture.sum().item()}")
    return [picture]


def main(args):
    config = ProjectConfiguration(project_dir=args.output_dir)
    loading = DataLoaderConfiguration(use_seedable_sampler=args.seedable)
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, project_config=config, dataloader_config=loading)
    logging.basicConfig(level="INFO")
    set_seed(7)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    model = Denoiser()
    if args.lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        model._hf_peft_config_loaded = False
        from peft import inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"]), model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.arange(96, dtype=torch.float32).reshape(16, 6) / 96
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=args.shuffle)

    def unwrap(module):
        return accelerator.unwrap_model(module)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            with open(os.path.join(output_dir, "hook.txt"), "w") as file:
                file.write(f"{len(models)} models")
            for module in models:
                unwrap(module).save_pretrained(os.path.join(output_dir, "denoiser"))
                weights.pop()

    def gathering_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save(models[0].state_dict(), os.path.join(output_dir, "gathered.pt"))

    def load_model_hook(models, input_dir):
        while models:
            models.pop()
        with open(os.path.join(input_dir, "hook.txt")) as file:
            accelerator.print(f"load hook: {file.read()}")

    accelerator.register_save_state_pre_hook(save_model_hook)
    if args.gather_in_hook:
        accelerator.register_save_state_pre_hook(gathering_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    if args.resume_from_checkpoint:
        found = sorted((d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")), key=lambda d: int(d.split("-")[1]))
        if found:
            accelerator.load_state(os.path.join(args.output_dir, found[-1]))
            step = int(found[-1].split("-")[1])
    losses = {}
    per_epoch = len(loader) // args.gradient_accumulation_steps
    while step < args.max_train_steps:
        done = step % per_epoch * args.gradient_accumulation_steps
        model.train()
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(batch)
                loss = (model(batch + noise) - noise).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                losses[step] = loss.item()
                if accelerator.is_main_process and step % args.every == 0:
                    if args.limit is not None:
                        found = sorted((d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")), key=lambda d: int(d.split("-")[1]))
                        for old in found[: max(0, len(found) - args.limit + 1)]:
                            shutil.rmtree(os.path.join(args.output_dir, old))
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{step}"))
                    if args.plain:
                        torch.save(unwrap(model).state_dict(), os.path.join(args.output_dir, "plain.pt"))
            if step == args.kill_at and step in losses and accelerator.process_index == args.kill_rank:
                time.sleep(1)  # the save of this step is durable by then
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.signal_at and step in losses and accelerator.process_index == args.kill_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(args.pause)
            if step >= args.max_train_steps:
                break
        if accelerator.is_main_process and not args.no_validation:
            images = log_validation(unwrap(model), accelerator, "validation")
            del images
    accelerator.wait_for_everyone()
    with open(os.path.join(args.output_dir, f"losses-{accelerator.process_index}.json"), "w") as file:
        json.dump(losses, file)
    if accelerator.is_main_process:
        time.sleep(args.slow)
        if args.lora:
            from peft import get_peft_model_state_dict
            from safetensors.torch import save_file

            adapter = get_peft_model_state_dict(unwrap(model).to(torch.float32))
            save_file({name: t.contiguous() for name, t in adapter.items()}, os.path.join(args.output_dir, "adapter.safetensors"))
        else:
            unwrap(model).save_pretrained(os.path.join(args.output_dir, "final"))
        torch.save(accelerator.get_state_dict(model) if args.state_dict else {}, os.path.join(args.output_dir, "whole.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--kill_at", type=int, default=-1)
    parser.add_argument("--signal_at", type=int, default=-1)
    parser.add_argument("--pause", type=float, default=0)
    parser.add_argument("--kill_rank", type=int, default=0)
    parser.add_argument("--slow", type=float, default=0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--state_dict", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--gather_in_hook", action="store_true")
    parser.add_argument("--no_validation", action="store_true")
    main(parser.parse_args())
