/* The floor under a streaming server: what the kernel charges for send() alone.
 *
 * usage: floor SOCKETS BYTES STEPS BURSTS SECONDS [SENDER_CORE READER_CORE]
 *
 * One process sends BYTES bytes to each of SOCKETS loopback connections in turn, STEPS times over; a child of it
 * reads them. That is a burst; the next one, of BURSTS, starts when all of it has been read. Where a reader is far
 * behind, the kernel only appends to what waits, which costs a fifth of a send, so STEPS should be 128 at most.
 * Prints the number of sends and the CPU microseconds they took the sender.
 * Ends by itself after SECONDS, whatever happens. Exit code 1, with a line on standard error, on any failure.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#endif

#define BATCH 64          /* ready connections the reader takes from the kernel at once */
#define READ_BYTES 65536  /* what the reader takes from one connection at once */

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

static void pin(int core) {
#ifdef __linux__
  cpu_set_t cores;
  if (core < 0) return;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) < 0) fail("sched_setaffinity");
#else
  (void)core;
#endif
}

static void allow_descriptors(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) < 0) fail("getrlimit");
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit); /* where it is refused, socket() or accept() says so */
}

static int *connect_all(struct sockaddr_in address, int count) {
  int *sockets = calloc(count, sizeof *sockets);
  if (!sockets) fail("calloc");
  for (int i = 0; i < count; i++) {
    sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
    if (sockets[i] < 0) fail("socket");
    if (connect(sockets[i], (struct sockaddr *)&address, sizeof address) < 0) fail("connect");
    fcntl(sockets[i], F_SETFL, O_NONBLOCK);
  }
  return sockets;
}

/* Counts what a read took; tells the sender when a burst is complete. */
static void count_bytes(ssize_t taken, long long burst, int done) {
  static long long total;
  if (taken <= 0) return;
  total += taken;
  if (total == burst) {
    total = 0;
    if (write(done, "", 1) < 0) fail("write");
  }
}

/* Reads every connection until the sender closes it. */
static void read_all(int *sockets, int count, long long burst, int done) {
  static char buffer[READ_BYTES];
  int left = count;
#ifdef __linux__
  struct epoll_event ready[BATCH];
  int set = epoll_create1(0);
  if (set < 0) fail("epoll_create1");
  for (int i = 0; i < count; i++) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = sockets[i]};
    if (epoll_ctl(set, EPOLL_CTL_ADD, sockets[i], &event) < 0) fail("epoll_ctl");
  }
  while (left) {
    int found = epoll_wait(set, ready, BATCH, -1);
    for (int i = 0; i < found; i++) {
      ssize_t taken = read(ready[i].data.fd, buffer, sizeof buffer);
      if (taken == 0) close(ready[i].data.fd), left--;
      count_bytes(taken, burst, done);
    }
  }
#else
  struct pollfd *ready = calloc(count, sizeof *ready);
  if (!ready) fail("calloc");
  for (int i = 0; i < count; i++) ready[i] = (struct pollfd){.fd = sockets[i], .events = POLLIN};
  while (left) {
    poll(ready, count, -1);
    for (int i = 0; i < count; i++) {
      if (!ready[i].revents) continue;
      ssize_t taken = read(ready[i].fd, buffer, sizeof buffer);
      if (taken == 0) close(ready[i].fd), ready[i].fd = -1, left--;
      count_bytes(taken, burst, done);
    }
  }
#endif
}

static void send_all(int *sockets, int count, const char *data, size_t bytes, int steps) {
  for (int step = 0; step < steps; step++)
    for (int i = 0; i < count; i++)
      for (size_t sent = 0; sent < bytes;) {
        ssize_t taken = send(sockets[i], data + sent, bytes - sent, 0);
        if (taken >= 0) {
          sent += taken;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
          struct pollfd full = {.fd = sockets[i], .events = POLLOUT};
          poll(&full, 1, -1);
        } else if (errno != EINTR) {
          fail("send");
        }
      }
}

static long long cpu_microseconds(void) {
  struct timespec used; /* not getrusage(), which counts by ticks on some kernels */
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) < 0) fail("clock_gettime");
  return used.tv_sec * 1000000LL + used.tv_nsec / 1000;
}

/* The reader ended while there was something to read: nobody would accept or drain any more. */
static void reader_ended(int signal) {
  (void)signal;
  _exit(1);
}

/* Starts the reader; returns a descriptor from which a byte can be read for every burst it has read. */
static int read_in_child(struct sockaddr_in address, int count, long long burst, int seconds, int core) {
  int done[2];
  if (pipe(done) < 0) fail("pipe");
  pid_t sender = getpid(), reader = fork();
  if (reader < 0) fail("fork");
  if (reader > 0) return done[0];
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
  if (getppid() != sender) exit(1);
  alarm(seconds);
  pin(core);
  read_all(connect_all(address, count), count, burst, done[1]);
  exit(0);
}

int main(int argc, char **argv) {
  if (argc != 6 && argc != 8) {
    fprintf(stderr, "usage: %s SOCKETS BYTES STEPS BURSTS SECONDS [SENDER_CORE READER_CORE]\n", argv[0]);
    return 1;
  }
  int count = atoi(argv[1]), steps = atoi(argv[3]), bursts = atoi(argv[4]), seconds = atoi(argv[5]), one = 1;
  size_t bytes = atol(argv[2]);
  char *data = malloc(bytes);
  int *sockets = calloc(count, sizeof *sockets), listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (!data || !sockets) fail("malloc");
  memset(data, 'x', bytes);
  alarm(seconds);
  allow_descriptors();
  if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) < 0 || listen(listener, 4096) < 0 ||
      getsockname(listener, (struct sockaddr *)&address, &length) < 0)
    fail("listen");
  signal(SIGCHLD, reader_ended);
  long long burst = (long long)count * steps * bytes;
  int done = read_in_child(address, count, burst, seconds, argc == 8 ? atoi(argv[7]) : -1);
  pin(argc == 8 ? atoi(argv[6]) : -1);
  for (int i = 0; i < count; i++) {
    sockets[i] = accept(listener, NULL, NULL);
    if (sockets[i] < 0) fail("accept");
    fcntl(sockets[i], F_SETFL, O_NONBLOCK);
    setsockopt(sockets[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  long long before = cpu_microseconds();
  for (int i = 0; i < bursts; i++) {
    send_all(sockets, count, data, bytes, steps);
    if (read(done, data, 1) != 1) fail("read");
  }
  printf("%lld %lld\n", (long long)bursts * steps * count, cpu_microseconds() - before);
  fflush(stdout);
  signal(SIGCHLD, SIG_DFL);
  for (int i = 0; i < count; i++) close(sockets[i]); /* ends the reader */
  wait(NULL);
  return 0;
}
