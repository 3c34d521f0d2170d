"""Loops whose bounds are known on the device only, in Triton's interpreter."""

import pytest

from narrowcast.kernels.launch import interpreted


@pytest.fixture(autouse=True)
def _bounds_of_loops_are_numbers(monkeypatch):
    """Read an array of one element as the number it holds.

    Triton 3.6's interpreter has such an array for every number, and numpy 2.5 makes no number of it
    any more where a loop asks for one.
    """
    if not interpreted():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
