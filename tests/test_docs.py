"""What the documents refer to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])


def missing_tests(text):
    """References like `test_x.py::test_y` to tests that there are not."""
    found = []
    for file, name in re.findall(r"`(?:tests/)?(test_\w+\.py)::(\w+)`", text):
        path = ROOT / "tests" / file
        if not path.exists() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            found.append(f"{file}::{name}")
    return found


def missing_links(path, text):
    """Relative links to files that there are not."""
    targets = re.findall(r"\]\((?!\w+:)([^)#]+)", text)
    return [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_and_files_that_documents_name_exist(path):
    text = path.read_text()
    assert missing_tests(text) == []
    assert missing_links(path, text) == []


def test_what_does_not_exist_is_found():
    assert missing_tests("`test_docs.py::test_nothing`, `test_docs.py::test_what_does_not_exist_is_found`") == [
        "test_docs.py::test_nothing"
    ]
    assert missing_links(ROOT / "README.md", "[a](nowhere.md) [b](README.md) [c](https://pytorch.org)") == [
        "nowhere.md"
    ]
