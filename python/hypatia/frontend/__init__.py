"""The ways in: how a model is captured, and how the compiled model is called.

A model and its inputs come in, something that is called like the model goes out. `dynamo` is
`torch.compile(backend="hypatia")`, `direct` is `hypatia.compile`, `optimize` is `hypatia.optimize`;
`train_dynamo` and `train` are the training steps of the first two. May import every package below:
`verifier`, `compiler`, `execute`, `capture`, `devices`.
"""
