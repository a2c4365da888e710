"""Hosts that run int4_emu: each module imports its host only when it is called."""
