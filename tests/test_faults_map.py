"""tests/faults.py is complete and points at tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import FAULTS

TESTS = Path(__file__).resolve().parent

# What the backward pass owes: each of these has a test that differentiates.
TRAINING = [5, 6, 7, 8, 12, 13, 14, 18, 24, 25, *range(30, 39), 41, 42, 43, 45, 47, 48]
BACKWARD_FILES = ("faults_backward", "faults_dropout", "faults_training", "training", "poison")


def functions(path: Path) -> set[str]:
    """Names of the tests that a file defines, methods as Class::method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_every_fault_has_an_entry() -> None:
    assert list(FAULTS) == [f"B{n:02}" for n in range(1, 49)]
    assert all(fault.title and fault.source and fault.tests for fault in FAULTS.values())


def test_backward_faults_have_tests() -> None:
    """One of the files that differentiate is named."""
    files = {f"test_{name}.py" for name in BACKWARD_FILES}
    missing = [
        n
        for n in TRAINING
        if not any(test.partition("::")[0] in files for test in FAULTS[f"B{n:02}"].tests)
    ]
    assert missing == []


@pytest.mark.parametrize("name", FAULTS)
def test_every_test_exists(name: str) -> None:
    for test in FAULTS[name].tests:
        file, _, function = test.partition("::")
        assert (TESTS / file).exists(), f"{name}: {test}"
        assert function.partition("[")[0] in functions(TESTS / file), f"{name}: {test}"


def test_every_fault_test_is_in_the_map() -> None:
    """A test named after a fault is listed under it."""
    listed = {test for fault in FAULTS.values() for test in fault.tests}
    lost = []
    for path in sorted(TESTS.glob("test_faults_*.py")):
        for function in functions(path):
            named = function.startswith("test_b") and function[6:8].isdigit()
            if named and f"{path.name}::{function}" not in listed:
                unlettered = "test_b48_" in function  # part of the contract that no report names
                lost += [] if unlettered else [f"{path.name}::{function}"]
    assert lost == []
