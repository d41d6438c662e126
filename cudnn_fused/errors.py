"""Errors that can be caught in two ways: as what they are in Python, and as what cuDNN raises for the same fault.

cuDNN's API reports most faults of an operand as ValueError. Code written for it catches that; code written for this
package may tell types from values. Each class below is both.
"""

from __future__ import annotations


class OperandTypeError(TypeError, ValueError):
    """An operand or an option is not of the right type: no tensor, not BF16, no whole number, or missing."""


class DeviceUnavailableError(RuntimeError, ValueError):
    """A GPU plan was asked for where there is no CUDA device."""
