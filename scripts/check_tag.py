"""Whether everything that names a version names that of a tag: python scripts/check_tag.py v1.2.3"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHART = "deploy/helm/penstock/Chart.yaml"


def problems(tag: str, today: str) -> list[str]:
    """What has another version than ``tag``; ``today``: the date that the changelog has to have."""
    version = tag.removeprefix("v")
    wanted = {
        "penstock/__init__.py": f'__version__ = "{version}"',
        "CITATION.cff": f"version: {version}",
        CHART: f'appVersion: "{version}"',
        "CHANGELOG.md": f"## {version} ({today})",
    }
    return [
        f"{name}: has no line {line!r}"
        for name, line in wanted.items()
        if not re.search(rf"^{re.escape(line)}$", (ROOT / name).read_text(), re.MULTILINE)
    ]


def main() -> int:
    found = problems(sys.argv[1], datetime.now(UTC).date().isoformat())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
