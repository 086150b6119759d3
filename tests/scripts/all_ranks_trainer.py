"""In the shape of a joint video and audio trainer: a class, and saves in which all ranks call everything.

FSDP2 with CPU offload over a flattened context x shard mesh; a frozen text encoder and VAE that FSDP ignores; two towers and a bridge,
trained whole or through adapters that FSDP ignores, too. The counters are written before the state, `exists()` is asked by each rank, and
the adapters are gathered. `--fault` makes the planning rank of a distributed save slow or dead, or one rank late, at the last save, or lets
one rank fail in the middle of a load.
"""

import argparse
import os
import re
import signal
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import set_seed
from torch import nn

IGNORED = ("text_encoder", "video_vae")


class DiTBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


class ConditionalCrossAttentionBlock(DiTBlock):
    pass


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.lora_B(self.lora_A(x))


class Joint(nn.Module):
    def __init__(self, width, adapted):
        super().__init__()
        self.text_encoder, self.video_vae = nn.Linear(width, width), nn.Linear(width, width)
        self.video = nn.ModuleList(DiTBlock(width) for _ in range(2))
        self.audio = nn.ModuleList(DiTBlock(width) for _ in range(2))
        self.bridge = ConditionalCrossAttentionBlock(width)
        self.adapter = Adapter(width) if adapted else None

    def forward(self, x):
        with torch.no_grad():
            x = self.video_vae(x) + self.text_encoder(torch.ones_like(x))
        video = audio = x
        for block in self.video:
            video = block(video)
        for block in self.audio:
            audio = block(audio)
        both = self.bridge(video + audio)
        return both if self.adapter is None else both + self.adapter(both)


class Position:
    """An object of the script's own in the checkpoint; one rank cannot put it back."""

    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        return {"shard": 3}

    def load_state_dict(self, state):
        if self.fails:
            raise ValueError(f"there is no shard {state['shard']} of the data here")


class Trainer:
    def __init__(self, args):
        self.args, self.global_step = args, 0
        set_seed(42)
        self.model = Joint(8, args.lora)
        ignored = [getattr(self.model, name) for name in IGNORED]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name if args.lora else name.partition(".")[0] not in IGNORED)
        if args.lora:
            ignored += list(self.model.adapter.modules())
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=ignored, cpu_offload=True, reshard_after_forward=False,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["DiTBlock", "ConditionalCrossAttentionBlock"],
            cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT")  # fmt: skip
        mesh = ParallelismConfig(cp_size=args.cp, dp_shard_size=int(os.environ["WORLD_SIZE"]) // args.cp) if args.cp > 1 else None
        self.accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh)
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        loader = torch.utils.data.DataLoader(torch.arange(256.0).reshape(32, 8) / 256, batch_size=1)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(self.model, optimizer, loader, scheduler)
        self.accelerator.register_for_checkpointing(Position(args.fault == "load" and self.accelerator.process_index == 1))

    def find_latest(self):
        names = os.listdir(self.args.save_path) if os.path.isdir(self.args.save_path) else []
        steps = [int(m.group(1)) for m in (re.match(r"^step-(\d+)$", name) for name in names) if m]
        return os.path.join(self.args.save_path, f"step-{max(steps)}") if steps else None

    def train(self):
        latest = self.find_latest() if self.args.resume else None
        if latest is not None:
            self.resume_checkpoint(latest)
        batches = iter(self.accelerator.skip_first_batches(self.loader, self.global_step))
        while self.global_step < self.args.steps:
            loss = (self.model(next(batches)) - torch.randn(8)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.global_step += 1
            self.accelerator.print(f"step {self.global_step}")
            if self.global_step % self.args.save_every == 0:
                self.save_checkpoint()
        self.save_checkpoint(final=True)
        self.accelerator.end_training()

    def save_checkpoint(self, final=False):
        self.accelerator.wait_for_everyone()
        step_dir = os.path.join(self.args.save_path, "final" if final else f"step-{self.global_step}")
        if self.accelerator.is_main_process:
            os.makedirs(step_dir, exist_ok=True)
        if self.args.lora:
            for tower in (self.model.video, self.model.audio):  # one after the other, without a barrier
                self.accelerator.get_state_dict(tower)
            whole = self.accelerator.get_state_dict(self.model)
            if self.accelerator.is_main_process:
                torch.save({name: t.cpu() for name, t in whole.items() if "lora_" in name}, os.path.join(step_dir, "adapter.pt"))
        if self.accelerator.is_main_process:
            torch.save({"global_step": self.global_step}, os.path.join(step_dir, "trainer_state.pt"))
            os.makedirs(os.path.join(step_dir, "accelerator"), exist_ok=True)
        self.accelerator.wait_for_everyone()
        if self.global_step == self.args.fault_at and not final:
            self.make_fault()
        self.accelerator.save_state(os.path.join(step_dir, "accelerator"))

    def make_fault(self):
        """What goes wrong in a save that rank 0 plans for all."""
        from torch.distributed.checkpoint import DefaultSavePlanner

        fault, rank, plan = self.args.fault, self.accelerator.process_index, DefaultSavePlanner.create_global_plan

        def hindered(planner, plans):
            if fault == "slow":
                time.sleep(self.args.delay)
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return plan(planner, plans)

        DefaultSavePlanner.create_global_plan = hindered
        if fault == "late" and rank == self.accelerator.num_processes - 1:
            time.sleep(self.args.delay)

    def resume_checkpoint(self, path):
        state = os.path.join(path, "trainer_state.pt")
        if os.path.exists(state):
            self.global_step = torch.load(state, weights_only=True)["global_step"]
        state = os.path.join(path, "accelerator")
        if os.path.exists(state):
            self.accelerator.load_state(state)
        self.accelerator.print(f"resumed at {self.global_step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_path", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save_every", type=int, default=2)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", choices=("slow", "killed", "late", "load"))
    parser.add_argument("--fault_at", type=int, default=4)
    parser.add_argument("--delay", type=float, default=20)
    Trainer(parser.parse_args()).train()
