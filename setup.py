"""What ``pyproject.toml`` cannot say: the wheel has a software bill of materials (PEP 770).

It is CycloneDX's JSON, made of what is packed: every file with its SHA-256 and its licence. No part of
another distribution is in the wheel; the demo model's files also have the licence of the text that it was
trained on. Neither the time nor the place of the build is in it.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

LICENCE = "Apache-2.0"
DEMO, DEMO_LICENCE = "penstock/demo/", "Apache-2.0 AND PSF-2.0"


def file_component(path: Path, root: Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    return {
        "type": "file",
        "name": name,
        "bom-ref": name,
        "hashes": [{"alg": "SHA-256", "content": sha256(path.read_bytes()).hexdigest()}],
        "licenses": [{"expression": DEMO_LICENCE if name.startswith(DEMO) else LICENCE}],
    }


def bill_of_materials(name: str, version: str, licence: str, root: Path) -> dict[str, Any]:
    """Of the files in ``root`` but those of the dist-info directory, which describe them."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file())
    files = [
        file_component(path, root) for path in paths if ".dist-info" not in path.relative_to(root).parts[0]
    ]
    this = f"pkg:pypi/{name}@{version}"
    digest = sha256(json.dumps(files).encode()).hexdigest()
    about = {"type": "library", "name": name, "version": version, "bom-ref": this, "purl": this}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, f'{this}#{digest}')}",
        "version": 1,
        "metadata": {"component": about | {"licenses": [{"expression": licence}]}},
        "components": files,
        "compositions": [{"aggregate": "complete", "assemblies": [this]}],
    }


class WheelWithBill(bdist_wheel):
    def write_wheelfile(self, wheelfile_base: str, *more: str) -> None:
        """Complete the dist-info directory. That of a wheel lies beside the files; pip has made it before."""
        super().write_wheelfile(wheelfile_base, *more)
        made = Path(wheelfile_base)
        if made.parent.resolve() != Path(self.bdist_dir).resolve():
            return
        about = self.distribution.metadata
        bill = bill_of_materials(
            about.get_name(), about.get_version(), about.license_expression or "", made.parent
        )
        (made / "sboms").mkdir()
        (made / "sboms" / f"{about.get_name()}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")


setup(cmdclass={"bdist_wheel": WheelWithBill})
