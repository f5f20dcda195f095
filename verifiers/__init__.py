"""Which drafted tokens may stay: lossless verification rules behind one interface."""

if __name__ != "stand.verifiers":
    raise ImportError(
        f"this package must be imported as stand.verifiers, got {__name__}; "
        "install the project (pip install -e .) and write `import stand.verifiers`"
    )
