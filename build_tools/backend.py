"""Build backend: setuptools', with CUTLASS, and nvcc for a GPU without one, only when needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
import config


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [
        *_setuptools.get_requires_for_build_wheel(config_settings),
        *config.build_requirements(),
    ]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [
        *_setuptools.get_requires_for_build_editable(config_settings),
        *config.build_requirements(),
    ]
