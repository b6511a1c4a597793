"""Our class in the place of torch's. Each test installs in a rank, a process of its own."""

import importlib
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.parallel
from ranks import run_ranks
from toys import batch, mlp

import gpucomm

# Not an attribute of this module: that would be replaced too.
STOCK = types.SimpleNamespace(DDP=torch.nn.parallel.DistributedDataParallel)


def module_holding(**names):
    module = types.ModuleType("held")
    vars(module).update(names)
    sys.modules["held"] = module
    return module


def in_a_process(body, *args):
    return run_ranks(lambda rank, world: body(*args), 1)[0]


def test_install_replaces_every_name_of_torchs_class():
    def body():
        held = module_holding(DDP=STOCK.DDP, DistributedDataParallel=STOCK.DDP, Other=torch.nn.Linear)
        replicate = importlib.import_module("torch.distributed._composable.replicate")
        gpucomm.install()
        ours = gpucomm.DistributedDataParallel
        assert torch.nn.parallel.DistributedDataParallel is ours
        assert torch.nn.parallel.distributed.DistributedDataParallel is ours
        assert replicate.DistributedDataParallel is ours
        assert held.DDP is held.DistributedDataParallel is ours
        assert held.Other is torch.nn.Linear

    in_a_process(body)


def test_modules_imported_later_find_ours():
    def body():
        sys.modules.pop("torch.distributed.pipelining.stage", None)  # another test file imports it
        gpucomm.install()
        stage = importlib.import_module("torch.distributed.pipelining.stage")
        assert stage.DistributedDataParallel is gpucomm.DistributedDataParallel

    in_a_process(body)


def test_uninstall_puts_torchs_class_back():
    def body():
        held = module_holding(DDP=STOCK.DDP)
        gpucomm.install()
        stage = importlib.import_module("torch.distributed.pipelining.stage")
        gpucomm.uninstall()
        for module in (torch.nn.parallel, torch.nn.parallel.distributed, stage):
            assert module.DistributedDataParallel is STOCK.DDP
        assert held.DDP is STOCK.DDP

    in_a_process(body)


def test_uninstall_leaves_alone_who_asked_for_ours():
    def body():
        held = module_holding(DDP=gpucomm.DistributedDataParallel)
        gpucomm.install()
        gpucomm.uninstall()
        assert held.DDP is gpucomm.DistributedDataParallel

    in_a_process(body)


def test_installing_again_reaches_what_came_in_between_and_is_undone_once():
    def body():
        gpucomm.install()
        held = module_holding(DDP=STOCK.DDP)
        gpucomm.install()
        assert held.DDP is gpucomm.DistributedDataParallel
        gpucomm.uninstall()
        assert held.DDP is torch.nn.parallel.DistributedDataParallel is STOCK.DDP
        gpucomm.uninstall()
        assert held.DDP is torch.nn.parallel.DistributedDataParallel is STOCK.DDP

    in_a_process(body)


def test_our_own_modules_keep_torchs_class_where_they_mean_it():
    def body():
        gpucomm.install()
        assert sys.modules["gpucomm.ddp.wrapper"].TorchDDP is STOCK.DDP
        assert gpucomm.DistributedDataParallel.__base__ is STOCK.DDP

    in_a_process(body)


def test_modules_that_import_on_access_are_not_asked():
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    def body():
        sys.modules["lazy"] = Lazy("lazy")
        sys.modules["none"] = None
        gpucomm.install()
        gpucomm.uninstall()

    in_a_process(body)


def test_a_class_derived_before_stays_torchs_and_is_named_once():
    def body():
        class Derived(STOCK.DDP):
            pass

        class MoreDerived(Derived):
            pass

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gpucomm.install()
            gpucomm.install()
        assert len(caught) == 2
        for cls, warning in zip((Derived, MoreDerived), caught, strict=True):
            assert f"{__name__}.{cls.__qualname__} was derived from torch's" in str(warning.message)
            assert warning.filename == __file__
            assert gpucomm.DistributedDataParallel not in cls.__mro__

    in_a_process(body)


def test_isinstance_holds_for_what_is_torchs_only_while_installed():
    def body():
        class Derived(STOCK.DDP):
            pass

        stock = STOCK.DDP.__new__(STOCK.DDP)
        ours = gpucomm.DistributedDataParallel
        assert not isinstance(stock, ours)
        with pytest.warns(UserWarning, match="Derived"):
            gpucomm.install()
        named = torch.nn.parallel.DistributedDataParallel
        assert isinstance(stock, named)
        assert issubclass(Derived, named)
        assert not isinstance(torch.nn.Linear(1, 1), named)
        assert not issubclass(torch.nn.Module, named)
        gpucomm.uninstall()
        assert not isinstance(stock, ours)
        assert not issubclass(Derived, ours)

    in_a_process(body)


def test_classes_derived_from_the_installed_one_are_ours_and_tell_theirs_apart():
    def body():
        gpucomm.install()

        class Derived(torch.nn.parallel.DistributedDataParallel):
            def to_kwargs(self, *args):
                return super().to_kwargs(*args)

        model = Derived(mlp())
        assert isinstance(model, Derived)
        assert isinstance(model, STOCK.DDP)
        assert model.transport == "loopback"
        assert not isinstance(gpucomm.DistributedDataParallel(mlp()), Derived)
        assert not isinstance(STOCK.DDP.__new__(STOCK.DDP), Derived)

    in_a_process(body)


def test_an_installed_class_trains_as_torchs_does():
    def body(rank, world, install):
        if install:
            gpucomm.install()
        model = torch.nn.parallel.DistributedDataParallel(mlp())
        assert isinstance(model, gpucomm.DistributedDataParallel) == install
        for iteration in range(3):
            model(batch(rank, iteration, 5, 24)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    ours, stock = (run_ranks(body, 2, install) for install in (True, False))
    for mine, theirs in zip(ours[0] + ours[1], stock[0] + stock[1], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("order", ["dynamo's name is torch's class", "dynamo's name is ours"])
def test_dynamo_knows_the_wrapper_whose_forward_runs(order):
    def body():
        convert_frame = importlib.import_module("torch._dynamo.convert_frame")
        if order == "dynamo's name is ours":
            gpucomm.install()
        else:  # somebody swapped the names of torch.nn.parallel only
            torch.nn.parallel.distributed.DistributedDataParallel = gpucomm.DistributedDataParallel
        seen = []

        class Looking(torch.nn.Linear):
            def forward(self, x):
                seen.append(convert_frame.DistributedDataParallel._get_active_ddp_module())
                return super().forward(x)

        replicated = importlib.import_module("torch.distributed._composable").replicate(torch.nn.Linear(2, 2))
        replicated(torch.randn(3, 2))  # sets the attribute on the class that it finds
        model = gpucomm.DistributedDataParallel(Looking(2, 2))
        model(torch.randn(3, 2))
        assert seen == [model]
        assert convert_frame.DistributedDataParallel._get_active_ddp_module() is None

    in_a_process(body)


def test_replicate_reduces_through_ours():
    def body(rank, world):
        gpucomm.install()
        replicate = importlib.import_module("torch.distributed._composable").replicate
        model = replicate(torch.nn.Linear(3, 1, bias=False))
        model(torch.full((1, 3), float(rank + 1))).sum().backward()
        assert isinstance(replicate.state(model)._ddp, gpucomm.DistributedDataParallel)
        return model.weight.grad

    for grad in run_ranks(body, 2):
        assert torch.equal(grad, torch.full((1, 3), 1.5))


def test_the_group_of_a_stock_wrapper_made_before_still_works():
    def body(rank, world):
        stock = STOCK.DDP(mlp())
        gpucomm.install()
        stock(batch(rank, 0, 5, 24)).sum().backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in stock.parameters()])
        both = [torch.empty_like(grads) for _ in range(world)]
        dist.all_gather(both, grads)
        return torch.equal(*both)

    assert run_ranks(body, 2) == [True, True]
