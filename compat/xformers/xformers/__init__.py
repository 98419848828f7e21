"""The modules of memeff_attn.xformers by the name of xFormers."""

import sys

from memeff_attn.xformers.aliases import install

install(sys.modules[__name__])
