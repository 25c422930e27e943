"""Which version this source is, installed or not."""

VERSION = "0.1.0"
