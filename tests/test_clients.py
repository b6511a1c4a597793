"""Frameworks as they are, over ours: their own scripts pass, and what they train equals stock DDP's bit for bit.

Two ranks over gloo. Needs the packages of the extra `clients`: `make test-clients` installs and runs.
"""

import importlib.util
from pathlib import Path

import pytest
from commands import environment, gpucomm_run

PROGRAMS = Path(__file__).parent / "clients"
OURS, STOCK = "gpucomm.ddp.wrapper", "torch.nn.parallel.distributed"

pytestmark = pytest.mark.clients


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: make test-clients")


def run(*arguments, cwd):
    """What the two ranks wrote, of a run that must succeed."""
    variables = environment(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    ran = gpucomm_run("--nproc-per-node", "2", *arguments, cwd=cwd, timeout_s=250, env=variables)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


def trained(*arguments, cwd):
    """What each part of a program trained, {name: (module of the wrapper's class, digest)}, the same on both ranks."""
    lines = [line.split("\t") for line in run(*arguments, cwd=cwd).splitlines() if line.count("\t") == 2]
    results = {name: (wrapper, digest) for name, wrapper, digest in lines}
    assert len(lines) == 2 * len(results)
    assert all(results[name] == (wrapper, digest) for name, wrapper, digest in lines)
    return results


def assert_same_bits(ours, stock):
    assert ours.keys() == stock.keys()
    for name, (wrapper, digest) in stock.items():
        assert wrapper == STOCK
        assert ours[name] == (OURS, digest), name


@needs("accelerate")
@pytest.mark.parametrize("script", ["test_sync", "test_script"])
def test_accelerates_own_scripts_pass(script, tmp_path):
    run("--patch", "-m", f"accelerate.test_utils.scripts.{script}", cwd=tmp_path)


@needs("torchdata")
@needs("accelerate")
def test_accelerates_data_loop_passes_with_uneven_inputs_joined(tmp_path):
    told = run("--patch", PROGRAMS / "accelerate_data_loop.py", cwd=tmp_path)
    assert told.count(f"joined {OURS}\n") >= 2


@needs("transformers")
def test_transformers_trains_saves_resumes_accumulates_and_clips(tmp_path):
    program = PROGRAMS / "transformers_trainer.py"
    stock, ours = (trained(*patch, program, tmp_path / str(len(patch)), cwd=tmp_path) for patch in ([], ["--patch"]))
    assert_same_bits(ours, stock)
    assert stock["resumed"] == stock["plain"]
    assert stock["accumulating"] != stock["plain"]


@pytest.fixture(scope="module")
def stock_lightning(tmp_path_factory):
    return trained(PROGRAMS / "lightning_boring.py", "plain", cwd=tmp_path_factory.mktemp("stock"))


@needs("lightning")
def test_lightning_trains_with_our_strategies(stock_lightning, tmp_path):
    assert_same_bits(trained(PROGRAMS / "lightning_boring.py", "ours", cwd=tmp_path), stock_lightning)


@needs("lightning")
def test_lightning_trains_patched(stock_lightning, tmp_path):
    assert_same_bits(trained("--patch", PROGRAMS / "lightning_boring.py", "plain", cwd=tmp_path), stock_lightning)
