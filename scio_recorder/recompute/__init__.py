"""Running recorded calls again, and what autograd keeps.

Who has room for all activations that they ask for would not miss this room.
"""
