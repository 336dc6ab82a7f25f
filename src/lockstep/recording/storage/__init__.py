"""The files of a recording: written whole, read in bounded memory, checked before they are believed."""
