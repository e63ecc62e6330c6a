"""Attention: the layer that models call, the classes a backend is made of, and the backends."""
