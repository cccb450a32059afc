"""Workers: a work order goes in, a step's output comes out. The only package that may import torch."""
