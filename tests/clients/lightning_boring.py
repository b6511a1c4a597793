"""Lightning's BoringModel and Fabric on two ranks; prints a digest of what was trained.

lightning_boring.py ours|plain: with the strategies of gpucomm.integrations.lightning, or with Lightning's own.
"""

import sys
import warnings

import torch
from digest import digest_of
from lightning import Trainer, fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy as PlainFabricStrategy
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy as PlainStrategy

warnings.filterwarnings("ignore", category=UserWarning)
if sys.argv[1] == "ours":
    from gpucomm.integrations.lightning import DDPStrategy, FabricDDPStrategy
else:
    DDPStrategy, FabricDDPStrategy = PlainStrategy, PlainFabricStrategy

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Watched:
    """Notes the class of the wrapper that the module is trained in."""

    def on_train_start(self):
        self.wrapper = type(self.trainer.strategy.model).__module__


class Automatic(Watched, BoringModel):
    pass


class Manual(Watched, ManualOptimBoringModel):
    pass


def train(cls, **arguments):
    seed_everything(1)
    model = cls()
    strategy = DDPStrategy(**arguments.pop("strategy", {}))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, limit_train_batches=4, limit_val_batches=2,
        **arguments, **QUIET,
    )  # fmt: skip
    trainer.fit(model)
    return model.wrapper, digest_of(model)


def train_with_fabric():
    runs = fabric.Fabric(accelerator="cpu", devices=2, strategy=FabricDDPStrategy())
    runs.launch()
    runs.seed_everything(2)
    module = torch.nn.Linear(32, 2)
    model, optimizer = runs.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = runs.setup_dataloaders(torch.utils.data.DataLoader(RandomDataset(32, 16), batch_size=2))
    for index, batch in enumerate(loader):
        accumulating = index % 2 == 0
        with runs.no_backward_sync(model, enabled=accumulating):
            runs.backward(model(batch).square().mean())
        if not accumulating:
            runs.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return type(model._forward_module).__module__, digest_of(module)


for name, result in {
    "automatic": train(Automatic),
    "accumulating and clipping": train(Automatic, accumulate_grad_batches=2, gradient_clip_val=0.1),
    "static graph": train(Automatic, strategy={"static_graph": True}),
    "manual": train(Manual),
    "manual, static graph": train(Manual, strategy={"static_graph": True}),
    "fabric": train_with_fabric(),
}.items():
    sys.stdout.write(f"{name}\t{result[0]}\t{result[1]}\n")
sys.stdout.flush()
