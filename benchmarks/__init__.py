"""Suites for asv: load time and memory, tokenizer, every CPU operation, sampler, prompt and generation, the GPU.

``asv.conf.json`` says how to run them.  Kernels are compiled in each suite's ``setup``, never while time is measured.
"""
