"""Every kind of activation, with parameters that random values meet on both sides."""

from engine.ops.activation import GEGLU, SWIGLU, Activation

EVERY_ACTIVATION = [
    SWIGLU,
    GEGLU,
    Activation("swiglu_oai", (1.5, 1.702)),
    Activation("swiglu_clamped", (1.5,)),
    Activation("swiglu_limited", (0.75,)),
    Activation("gelu"),
    Activation("relu2"),
    Activation("gelu_erf"),
    Activation("xielu", (0.8, 0.4, 0.5, -1e-6)),
]
