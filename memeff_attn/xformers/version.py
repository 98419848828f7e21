"""The xFormers release whose interface this package has."""

__version__ = "0.0.35+memeff"
