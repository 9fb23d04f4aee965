"""tpu-inference's attention interface of 0.32, without tpu-inference: names, arguments and fields that `attn` uses.

`benchmarks/tpu_inference_cpu.py` runs the real package and compares it with this one.
"""
