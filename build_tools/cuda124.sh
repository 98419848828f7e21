#!/usr/bin/env bash
# Assembles a CUDA 12.4 compiler without root: the last CUDA line that targets sm_70 to sm_90a at once and whose binaries
# run on the drivers of V100 and A100 clusters.
#
#   build_tools/cuda124.sh FOLDER        1 GB, some minutes; needs a Debian with network, pip, python3 and g++-12 or 13
#   CUDA_HOME=FOLDER MEMEFF_CUDA_ARCHS=70,80,90 pip install .
#
# The compiler is Debian trixie's (package nvidia-cuda-toolkit, section non-free), headers and the static runtime are PyPI's.
# The assembler is 12.9's: 12.4's makes the wgmma kernels' products wait for one another (C7513); for
# sm_70 both give about the same. The static runtime is 12.9's, since 12.4's package has only the shared one; CUDA 12 keeps it compatible within the major.
set -euo pipefail

SUITE=trixie
DEBIAN_PACKAGES=(nvidia-cuda-toolkit libnvvm4 libcu++-dev)
HEADER_WHEELS=(nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131)
RUNTIME_WHEEL=nvidia-cuda-runtime-cu12==12.9.79
ASSEMBLER_WHEEL=nvidia-cuda-nvcc-cu12==12.9.86

die() { echo "cuda124.sh: $*" >&2; exit 1; }
[ $# -eq 1 ] || die "usage: cuda124.sh FOLDER"
for tool in apt-get dpkg-deb pip python3; do command -v $tool >/dev/null || die "$tool is missing (this script is for Debian)"; done
target=$(realpath -m "$1")
if [ -e "$target" ] && [ ! -x "$target/bin/nvcc" ] && [ -n "$(ls -A "$target")" ]; then die "$target is not empty"; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The machine's own mirror, whatever suite it is set to.
debian_mirror() {
  local found
  found=$(grep -rhoE '^URIs: *[^ ]+/debian/?$' /etc/apt/sources.list.d/ 2>/dev/null | head -1 | sed 's/^URIs: *//')
  [ -n "$found" ] || found=$(grep -hoE '^deb .*' /etc/apt/sources.list 2>/dev/null | grep -oE '[a-z+]+://[^ ]+/debian/?( |$)' | head -1 | tr -d ' ')
  [ -n "$found" ] || found=http://deb.debian.org/debian
  echo "$found"
}

# Package lists of SUITE in the scratch folder; the machine's own are not touched.
fetch_debian() {
  local state=$scratch/apt keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  mkdir -p "$state/lists/partial" "$scratch/deb"
  echo "deb [signed-by=$keyring] $(debian_mirror) $SUITE main contrib non-free" >"$state/sources.list"
  local options=(-qq -o "Dir::Etc::SourceList=$state/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$state/lists" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$scratch/deb" && apt-get "${options[@]}" download "${DEBIAN_PACKAGES[@]}")
  local package
  for package in "$scratch"/deb/*.deb; do dpkg-deb -x "$package" "$scratch/root"; done
}

# fetch_wheels SUBFOLDER REQUIREMENT...: unpacked one over the other.
fetch_wheels() {
  local into=$scratch/$1; shift
  pip download -q --no-deps --no-cache-dir --only-binary :all: -d "$into.whl" "$@"
  local wheel
  for wheel in "$into".whl/*.whl; do python3 -m zipfile -e "$wheel" "$into"; done
}

echo "compiler from Debian $SUITE ..."
fetch_debian
echo "headers and runtime from PyPI ..."
fetch_wheels headers "${HEADER_WHEELS[@]}"
fetch_wheels runtime "$RUNTIME_WHEEL"
fetch_wheels assembler "$ASSEMBLER_WHEEL"

usr=$scratch/root/usr
toolkit=$usr/lib/nvidia-cuda-toolkit
rm -rf "$target"
mkdir -p "$target"/{bin,include,lib64,nvvm/bin,nvvm/libdevice}
for name in nvcc cicc; do cp -L "$toolkit/bin/$name" "$target/bin/"; done
for name in cudafe++ fatbinary nvlink bin2c cuobjdump nvdisasm; do cp -L "$usr/bin/$name" "$target/bin/"; done
cp "$scratch/assembler/nvidia/cuda_nvcc/bin/ptxas" "$target/bin/"
[ ! -d "$toolkit/bin/crt" ] || cp -r "$toolkit/bin/crt" "$target/bin/"
ln -s ../../bin/cicc "$target/nvvm/bin/cicc"
cp "$toolkit"/libdevice/* "$target/nvvm/libdevice/"
cp -r "$scratch"/headers/nvidia/cuda_runtime/include/. "$scratch"/headers/nvidia/cuda_nvcc/include/. "$target/include/"
for name in cuda nv; do [ ! -d "$usr/include/$name" ] || cp -r "$usr/include/$name" "$target/include/"; done # libcu++
cp "$scratch"/runtime/nvidia/cuda_runtime/lib/*.a "$target/lib64/"
cp "$scratch"/runtime/nvidia_cuda_runtime*.dist-info/licenses/License.txt "$target/EULA.txt" # of what a wheel holds
# Where nvcc looks for its parts, all relative to itself.
cat >"$target/bin/nvcc.profile" <<'PROFILE'
TOP              = $(_HERE_)/..
CICC_PATH        = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH            += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES        += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES        =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
chmod +x "$target"/bin/*
"$target/bin/nvcc" --version | grep release || die "the assembled nvcc does not run"
echo "done: CUDA_HOME=$target"
