"""The shell: reads the clock, draws identities, talks to clients, workers and storage. Decides nothing."""
