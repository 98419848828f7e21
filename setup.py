"""pip install .: build_tools/build_kernels.py builds _C, all else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_tools"))
import config  # noqa: E402


class BuildKernels(build_ext):
    """Builds _C for the wanted GPUs, or host-only, and says which in one line."""

    def build_extension(self, ext: Extension) -> None:
        import build_kernels

        try:
            archs, line = config.decide()
            print(f"memeff_attn: {line}", flush=True)
            module = build_kernels.build(build_kernels.options_for(archs))
        except (config.BuildError, ValueError) as error:
            raise SystemExit(f"memeff_attn: error: {error}") from None
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(module), str(target))


setup(
    version=config.version(),
    ext_modules=[Extension("memeff_attn._C", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
