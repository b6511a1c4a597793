"""The command line, as processes; what `gpucomm run --patch` puts into each, mostly without a launcher around it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, gpucomm_run, run_python

import gpucomm
import gpucomm.cli

PATCH = Path(gpucomm.__file__).parent / "cli/patch"

# What a script finds. Of torch only if it is imported: that takes seconds.
FACTS = """
import json, os, sys

main, parallel = sys.modules["__main__"], sys.modules.get("torch.nn.parallel")
facts = dict(
    ddp=parallel and parallel.DistributedDataParallel.__module__, argv=sys.argv, name=__name__, file=__file__,
    spec=getattr(__spec__, "name", None), path=sys.path, names=sorted(vars(main)), rank=os.environ.get("RANK"),
    transport=os.environ.get("GPUCOMM_TRANSPORT"),
)
sys.stdout.flush()
os.write(1, (json.dumps(facts) + "\\n").encode())  # in one piece: ranks write to one pipe
"""
WITH_TORCH = "import torch\n" + FACTS


def command(*arguments, cwd, patched=False):
    """Runs Python with the arguments; patched: as a rank of `gpucomm run --patch` is."""
    return run_python(*arguments, cwd=cwd, env=environment([PATCH] if patched else []))


def script(folder, text, name="script.py"):
    (folder / name).write_text(text)
    return name


def facts_of(ran):
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


# ---- usage


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=str)
def test_help_lists_the_subcommands(arguments, capsys):
    assert gpucomm.cli.main(arguments) == 0
    assert re.findall(r"^  (\w+)", capsys.readouterr().out, re.MULTILINE) == ["run"]


def test_the_version_is_told(tmp_path):
    assert run_python("-m", "gpucomm", "--version", cwd=tmp_path).stdout == f"gpucomm {gpucomm.__version__}\n"


def test_help_of_run_has_torchruns_options_and_ours(capsys):
    with pytest.raises(SystemExit, match="0"):
        gpucomm.cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: gpucomm run ")
    assert {"--patch", "--transport", "--nproc-per-node", "--rdzv-endpoint"} <= set(re.findall(r"--[\w-]+", text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["walk"], "gpucomm: unknown subcommand 'walk'"),
        (["--walk"], "gpucomm: unknown option '--walk'"),
        (["run"], "gpucomm run: .*training_script"),
        (["run", "absent.py"], "gpucomm run: there is no script 'absent.py'"),
        (["run", "-m", "absent.module"], "gpucomm run: there is no module 'absent.module'"),
        (["run", "--no-python", "absent"], "gpucomm run: there is no program 'absent'"),
        (["run", "--transport", "pigeon", "s.py"], "gpucomm run: .*--transport.*pigeon.*shm"),
        (["run", "--nproc-per-node", "many", "s.py"], "gpucomm run: argument --nproc-per-node is 'many'"),
        (["run", "--nproc-per-node", "0", "s.py"], "gpucomm run: argument --nproc-per-node is '0'"),
        (["run", "--nnodes", "1:2:3", "s.py"], "gpucomm run: argument --nnodes is '1:2:3'"),
        (["run", "--tee", "9", "s.py"], "gpucomm run: argument --tee is '9'"),
        (["run", "--no-such-option", "s.py"], "gpucomm run: .*--no-such-option"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = gpucomm.cli.main(arguments)
    except SystemExit as end:
        status = end.code
    out, err = capfd.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.match(message, err)


# ---- run


@pytest.mark.parametrize(
    ("options", "variables", "standalone"),
    [
        ([], {}, True),
        (["--nproc-per-node", "2", "--max-restarts=1"], {}, True),
        (["--standalone"], {}, True),
        (["--master-port", "29500"], {}, False),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=host:1"], {}, False),
        (["--nnodes", "2"], {}, False),
        ([], {"PET_RDZV_ENDPOINT": "host:1"}, False),
        ([], {"PET_MASTER_ADDR": "host"}, False),
    ],
)
def test_a_rendezvous_of_its_own_is_made_where_none_is_named(options, variables, standalone, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: seen.append(args))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gpucomm.cli.main(["run", *options, str(tmp_path / script(tmp_path, ""))]) == 0
    assert [bool(args.standalone) for args in seen] == [standalone]


def test_the_ranks_environment_is_not_that_of_the_caller_afterwards(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("torch.distributed.run.run", lambda args: seen.update(os.environ))
    monkeypatch.setenv("GPUCOMM_TRANSPORT", "c10d")
    before = dict(os.environ)
    gpucomm.cli.main(["run", "--transport", "shm", str(tmp_path / script(tmp_path, ""))])
    assert seen == before | {"GPUCOMM_TRANSPORT": "shm"}
    assert dict(os.environ) == before


def test_run_passes_torchruns_options_and_the_scripts_arguments_on(tmp_path):
    name = script(tmp_path, FACTS)
    ran = gpucomm_run("--nproc-per-node", "2", "--transport", "c10d", name, "--patch", "-m", "x y", cwd=tmp_path)
    facts = facts_of(ran)
    assert {fact["rank"] for fact in facts} == {"0", "1"}
    for fact in facts:
        assert fact["argv"] == [name, "--patch", "-m", "x y"]
        assert fact["transport"] == "c10d"
        assert fact["ddp"] is None


def test_run_with_patch_trains_an_unedited_script_with_ours(tmp_path):
    name = script(
        tmp_path,
        "import sys, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))\n"
        "model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()\n"
        "sys.stdout.write(f'{model.transport} {model.module.weight.grad.item()}\\n')\n"
        "dist.destroy_process_group()\n",
    )
    ran = gpucomm_run("--patch", "--nproc-per-node=2", name, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "shm 1.5\n" * 2), ran.stderr


def test_a_failing_rank_makes_the_status_torchruns(tmp_path):
    name = script(tmp_path, "raise ArithmeticError('of the script')\n")
    ran = gpucomm_run("--patch", name, cwd=tmp_path)
    assert ran.returncode == 1
    assert f'  File "{tmp_path / name}", line 1, in <module>' in ran.stderr
    assert "ArithmeticError: of the script" in ran.stderr


def test_ctrl_c_ends_the_ranks(tmp_path):
    name = script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpucomm", "run", "--patch", name],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        rank = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert not Path(f"/proc/{rank}").exists()


# ---- what a rank finds


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_patched_program_is_run_as_without(how, tmp_path):
    name = script(tmp_path, FACTS)
    arguments = [name, "-a", "b"] if how == "script" else ["-m", "script", "-a", "b"]
    (patched,) = facts_of(command(*arguments, cwd=tmp_path, patched=True))
    (plain,) = facts_of(command(*arguments, cwd=tmp_path))
    assert patched == plain


@pytest.mark.parametrize("ending", ["raise ValueError('x')", "import sys; sys.exit(7)", "import sys; sys.exit('text')"])
def test_a_patched_program_ends_as_without(ending, tmp_path):
    name = script(tmp_path, f"def f():\n    {ending}\nf()\n")
    patched, plain = (command(name, cwd=tmp_path, patched=patched) for patched in (True, False))
    assert plain.returncode != 0
    assert (patched.returncode, patched.stderr) == (plain.returncode, plain.stderr)


def test_a_program_without_torch_imports_nothing(tmp_path):
    name = script(tmp_path, "import sys\nprint('torch' in sys.modules, 'gpucomm' in sys.modules)\n")
    assert command(name, cwd=tmp_path, patched=True).stdout == "False False\n"


def test_asking_whether_there_is_a_torch_does_not_lose_the_patch(tmp_path):
    name = script(tmp_path, "import importlib.util\nassert importlib.util.find_spec('torch')\n" + WITH_TORCH)
    (facts,) = facts_of(command(name, cwd=tmp_path, patched=True))
    assert facts["ddp"] == "gpucomm.ddp.wrapper"


def test_spawned_processes_and_their_loaders_are_patched_and_work(tmp_path):
    name = script(
        tmp_path,
        "import multiprocessing, torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def child(queue):\n"
        "    queue.put(DistributedDataParallel.__module__)\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=1)\n"
        "    print(queue.get(), [batch.tolist() for batch in loader])\n",
    )
    ran = command(name, cwd=tmp_path, patched=True)
    assert ran.stdout == "gpucomm.ddp.wrapper [[0, 1], [2, 3]]\n", ran.stderr


def test_a_sitecustomize_that_is_hidden_runs_too(tmp_path):
    (tmp_path / "site").mkdir()
    script(tmp_path / "site", "import builtins\nbuiltins.customized = __file__\n", "sitecustomize.py")
    name = script(tmp_path, "print(customized)\n" + WITH_TORCH)
    ran = run_python(name, cwd=tmp_path, env=environment([PATCH, tmp_path / "site"]))
    first, facts = ran.stdout.splitlines()
    assert first == str(tmp_path / "site/sitecustomize.py")
    assert json.loads(facts)["ddp"] == "gpucomm.ddp.wrapper"


def test_gpucomm_is_found_where_the_launcher_found_it(tmp_path):
    # The launcher's path had the folder that the package is in; the rank's has not.
    name = script(tmp_path, WITH_TORCH)
    (facts,) = facts_of(run_python(name, cwd=tmp_path, env=environment(PYTHONPATH=str(PATCH))))
    assert facts["ddp"] == "gpucomm.ddp.wrapper"
