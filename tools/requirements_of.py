"""Prints, one a line, the requirements that pyproject.toml lists under a name.

    requirements_of.py run | build | EXTRA

"run" are the run-time dependencies, "build" those of [build-system] with cmake and ninja, which pip's build isolation
would fetch. Spaces are left out, so that a shell can split the output into words.
"""

import re
import sys
from pathlib import Path


def _strings(text: str, header: str, key: str) -> list[str]:
    # Python 3.10 has no TOML reader; the arrays meant here hold plain strings only.
    table = re.search(rf"^\[{re.escape(header)}\]$(.*?)(?=^\[[a-z]|\Z)", text, re.MULTILINE | re.DOTALL)
    array = table and re.search(rf"^{re.escape(key)} = \[(.*?)\]$", table.group(1), re.MULTILINE | re.DOTALL)
    if not array:
        sys.exit(f"error: pyproject.toml has no [{header}] {key}")
    return [requirement.replace(" ", "") for requirement in re.findall(r'"([^"]*)"', array.group(1))]


def main(name: str) -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    if name == "run":
        found = _strings(text, "project", "dependencies")
    elif name == "build":
        found = [*_strings(text, "build-system", "requires"), "cmake", "ninja"]
    else:
        found = _strings(text, "project.optional-dependencies", name)
    print("\n".join(found))


if __name__ == "__main__":
    main(sys.argv[1])
