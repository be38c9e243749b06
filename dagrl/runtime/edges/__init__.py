"""The edges of compiled graphs: shared memory within a host, TCP between hosts."""
