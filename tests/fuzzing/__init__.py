"""Random and damaged bytes through every decoder: an error of ours, or a correct result.

``python -m fuzzing --bytes N --seed S`` feeds at least N bytes to each decoder (``make fuzz``). One case in four
is random bytes; the others are valid objects that were damaged: bits flipped, cut, spliced, numbers replaced, and the
digests made to fit again, so that what stands behind them is reached too.

What holds for every case: nothing outside the output or the input is written, or read with any effect; memory stays
within a small multiple of what the input and the output declare; and what is accepted is what the plain-Python decoder
of ``reference`` makes of the same bytes (chunks), or follows from the bytes by the format's own rules (the others).
"""
