"""The tests for a GPU, those of tests/ with the mark `gpu`; in a dry run two of them over the stand-ins."""

import subprocess
import sys
import xml.etree.ElementTree as Xml
from importlib import util

from gpu.parts import NotRun
from gpu.place import ROOT, Place
from gpu.report import Report

_GRACE_S = 5.0
_TWO = "stand_in and (many_gradients_take or those_of_the_plain_module)"


def run(place: Place, report: Report) -> None:
    if util.find_spec("pytest") is None:
        raise NotRun("there is no pytest")
    found = place.folder / "tests.xml"
    chosen = ["-k", _TWO] if place.dry_run else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/test_on_gpu.py"), *chosen, "-q"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    command += ["-W", "default", f"--junitxml={found}"]  # another torch may warn of other things
    ran = subprocess.run(command, timeout=place.left_s - _GRACE_S, check=False)
    if not found.exists():
        raise RuntimeError(f"pytest ended with status {ran.returncode} and left no results")
    (suite,) = Xml.parse(found).getroot().iter("testsuite")
    total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    names = [case.get("name") for case in suite.iter("testcase") if not case.findall("*")]
    report.row("failed", failed, names=[c.get("name") for c in suite.iter("testcase") if _has_failed(c)])
    report.row("passed", total - failed - skipped, names=names, skipped=skipped)


def _has_failed(case: Xml.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None
