"""Every control message, one file for each subject."""
