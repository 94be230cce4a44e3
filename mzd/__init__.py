"""mzd: a daemon that keeps a language model usable on a device whose memory belongs to everybody."""

__version__ = "0.1.0"
