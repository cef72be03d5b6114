"""Models with random weights of published or tiny shapes: for tests, measurements and the mirror.

`shapes` says what they are like, `weights` fills them by name, `checkpoints` lays them down as
transformers and peft read them, with the processors and tokenizers of `words`.
"""
