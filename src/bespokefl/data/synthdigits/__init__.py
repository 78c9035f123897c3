"""Synthetic digits, drawn by the project itself."""

from bespokefl.data.synthdigits.drawing import GREATEST_SIZE, LEAST_SIZE, synth_digits

__all__ = ["GREATEST_SIZE", "LEAST_SIZE", "synth_digits"]
