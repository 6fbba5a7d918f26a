"""Workers: any number of processes that fill one recording, part by part.

Who collects in one process would not miss this room.
"""
