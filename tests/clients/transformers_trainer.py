"""transformers' Trainer on a tiny model: trains, saves, resumes, accumulates, clips; prints digests.

transformers_trainer.py FOLDER
"""

import sys
from pathlib import Path

import torch
from digest import digest_of
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

folder = Path(sys.argv[1])


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = torch.randint(50, (32, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watching(TrainerCallback):
    """Notes the class of the wrapper that the model is trained in."""

    def on_step_end(self, args, state, control, **kwargs):
        self.wrapper = type(self.trainer.model_wrapped).__module__


def trainer_for(name, **arguments):
    set_seed(3)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    watching = Watching()
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=str(folder / name), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=2, max_steps=4,
            save_steps=2, logging_strategy="no", report_to=[], disable_tqdm=True, seed=3, dataloader_num_workers=0,
            max_grad_norm=0.5, **arguments,
        ),
        train_dataset=Tokens(),
        callbacks=[watching],
    )  # fmt: skip
    watching.trainer = trainer
    return trainer, watching


def train(name, resume=None, **arguments):
    trainer, watching = trainer_for(name, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    sys.stdout.write(f"{name}\t{watching.wrapper}\t{digest_of(trainer.model)}\n")


train("plain")
train("resumed", resume=str(folder / "plain/checkpoint-2"))
train("accumulating", gradient_accumulation_steps=2)
train("static_graph", ddp_static_graph=True, ddp_bucket_cap_mb=1)
train("checkpointing", gradient_checkpointing=True, ddp_find_unused_parameters=False)
sys.stdout.flush()
torch.distributed.destroy_process_group()
