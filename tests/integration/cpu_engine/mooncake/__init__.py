"""What SGLang's transfer backend `mooncake` imports of Mooncake, over loopback."""
