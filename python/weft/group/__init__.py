"""The ranks of a group: how they find each other, take turns and share windows."""
