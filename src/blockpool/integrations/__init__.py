"""Integrations: our books in the place where an engine keeps its own.

They may see every other room, and no other room sees them. Each works without its engine being installed.
"""
