"""The order of imports between the sub-packages of the gateway."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.test_house import PACKAGE, imports

ROOT = "penstock.gateway."


def test_sub_packages_import_without_a_cycle() -> None:
    """Raises CycleError with the packages of a cycle."""
    packages = {path.parent.name: path.parent for path in (PACKAGE / "gateway").glob("*/__init__.py")}
    graph = {
        name: {
            other
            for path in folder.rglob("*.py")
            for imported in imports(path)
            if imported.startswith(ROOT) and (other := imported.removeprefix(ROOT).partition(".")[0]) != name
        }
        for name, folder in packages.items()
    }
    TopologicalSorter(graph).prepare()
    assert not graph["upstream"] & set(packages), "it imports no other sub-package"
    assert not {"app", "assembly", "process"} & set().union(*graph.values()), (
        "these stand above the sub-packages"
    )
