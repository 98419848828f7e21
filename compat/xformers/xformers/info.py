"""`python -m xformers.info`: which operators run here, and why the others do not."""

from memeff_attn.xformers.info import get_features_status as get_features_status
from memeff_attn.xformers.info import print_info

if __name__ == "__main__":
    print_info()
