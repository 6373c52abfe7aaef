"""Schedules measured with real training steps, each in a process of its own.

``trial`` says what is trained, ``child`` measures one mode of it, ``runner`` starts the children
and keeps what they found in a file, ``cells`` compares it, ``tables`` and ``picture`` show it.
"""
