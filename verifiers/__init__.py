"""Which drafted tokens may stay: lossless verification rules behind one interface."""

if __name__ != "stand.verifiers":
    raise ImportError(
        f"this package must be imported as stand.verifiers, got {__name__}; "
        "install the project (pip install -e .) and write `import stand.verifiers`"
    )

from stand.extra import MissingExtraError, has_engine

if not has_engine():
    raise MissingExtraError("stand.verifiers")

from stand.verifiers.draw import draw_tokens
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.registry import fitting_names, get_verifier, verifier_names
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import Requirements, ThresholdVerifier, Verdicts, Verifier

__all__ = [
    "Requirements",
    "TargetRows",
    "ThresholdVerifier",
    "Verdicts",
    "Verifier",
    "VerifierNoise",
    "draw_tokens",
    "fitting_names",
    "get_verifier",
    "verifier_names",
]
