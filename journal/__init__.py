"""The journal: the event vocabulary, records with a hash chain, and the stores that hold them."""
