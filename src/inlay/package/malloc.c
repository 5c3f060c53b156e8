/* Counts allocations. Loaded before libc (LD_PRELOAD), it records the size of every block that the process allocates
 * while it is on. For glibc, whose functions do the allocation. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

enum { kMost = 1 << 20 };
static size_t sizes[kMost], least;
static atomic_long used;
static atomic_int on;

static void note(size_t size) {
  if (!atomic_load_explicit(&on, memory_order_relaxed) || size < least) return;
  long at = atomic_fetch_add(&used, 1);
  if (at < kMost) sizes[at] = size;
}

void* malloc(size_t size) {
  note(size);
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  note(count * size);
  return __libc_calloc(count, size);
}

void* realloc(void* old, size_t size) {
  note(size);
  return __libc_realloc(old, size);
}

void* memalign(size_t alignment, size_t size) {
  note(size);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* made = memalign(alignment, size);
  if (!made && size) return ENOMEM;
  *out = made;
  return 0;
}

void* mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) {
  if (flags & MAP_ANONYMOUS) note(size);
  return (void*)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

void* mmap64(void*, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

void inlay_malloc_start(size_t smallest) {
  least = smallest;
  atomic_store(&used, 0);
  atomic_store(&on, 1);
}

/* Returns the number of blocks, and their sizes in `found`. -1 if there were too many. */
long inlay_malloc_stop(size_t** found) {
  atomic_store(&on, 0);
  *found = sizes;
  return used <= kMost ? used : -1;
}
