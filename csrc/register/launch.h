// The register family: the chained forward kernel with P in registers (register_mma.h); everything else is the same.
#pragma once

#include "chained/launch.h"

namespace memeff {
namespace registers {

using chained::launch_forward;

template <typename Arch, typename Tile, typename Warp, typename Qk, int kAlignment, typename Bias, int kBlocksPerSm>
using ForwardTraits =
    chained::ForwardTraits<Arch, Tile, Warp, Qk, chained::WeightsInRegisters, kAlignment, Bias, kBlocksPerSm>;

}  // namespace registers
}  // namespace memeff
