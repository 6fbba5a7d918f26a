"""The recorder with other tools; a file that imports a tool needs the extra of its name.

Who uses none of these tools would not miss this room.
"""
