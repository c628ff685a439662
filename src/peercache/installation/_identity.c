/* Says which sources this library was compiled from; see sources.py. */

const char *peercache_sources(void)
{
    return PEERCACHE_SOURCES;
}
