"""The audit read model at work: where it lies, catching up, asking it, exporting it, and following a running engine."""
