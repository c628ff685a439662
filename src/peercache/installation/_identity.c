/* Identifies the sources that this library was compiled from; see sources.py. */

const char *peercache_sources(void)
{
    return PEERCACHE_SOURCES;
}
