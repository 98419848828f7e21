"""An environment in which `import xformers` is compat/xformers, as after its installation: the
package on the path, and the metadata that importlib.metadata finds."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = ROOT / "compat" / "xformers"


def version() -> str:
    found = re.search(r'^version = "(.+)"', (DISTRIBUTION / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return found[1]


def environment(folder: Path) -> dict[str, str]:
    """Variables for a subprocess; writes the metadata below `folder`."""
    place = folder / "site" / f"xformers-{version()}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: xformers\nVersion: {version()}\n"
    )
    paths = [str(DISTRIBUTION), str(place.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
