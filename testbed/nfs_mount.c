/*
 * nfs_mount: an NFS 3 export as a folder, through FUSE and libnfs, for nodes whose kernel has no NFS client.
 *
 *     nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS
 *
 * PATIENCE_MS: after so long without an answer a call fails; 0: never, as with the mount option "hard".
 * FLAGS: what the kernel is told of the mount, such as "ro,nosuid".
 *
 * libnfs's contexts are not made for several threads, so one thread makes all calls, one after the other, each with the
 * uid and gid of the process that caused it; the server decides. Of a process's further groups the server learns
 * nothing. FUSE's threads hand calls in and wait. A process that is killed while its server does not answer goes at
 * once, as with the kernel's client: its call is abandoned, and freed when it comes back.
 *
 * Attributes and names are kept for KEPT_SECONDS, attributes no longer than to the next open; data until the file is opened
 * again and has changed: about what the kernel's client does. Locks hold on this machine only. NFS 3, since opening a file with NFS 4
 * fails in libnfs 4.0 (ERANGE).
 */
#define FUSE_USE_VERSION 31
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <nfsc/libnfs.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <time.h>

/* Fixed, so that the port mapper need not be asked and a firewall can know it. */
enum { MOUNT_PORT = 20048, NFS_PORT = 2049 };
/* How often a waiting process is asked whether it has been killed. */
enum { LOOK_NS = 20 * 1000 * 1000 };
/* The least that the kernel's client keeps attributes of a file (acregmin); those of a folder, it keeps for 30 s. */
enum { KEPT_SECONDS = 3 };

/* A call of libnfs, with copies of all that it needs: who asked for it may be gone when it is made. */
struct call {
    int (*make)(struct call *);
    pid_t pid; /* the process that caused it */
    uid_t uid;
    gid_t gid;
    char *path, *other_path;
    char *data; /* read, written, or the names of a folder, one after the other */
    size_t size;
    off_t offset;
    int number; /* flags, mode */
    uid_t new_uid;
    gid_t new_gid;
    struct timespec times[2];
    struct nfsfh *file;
    struct nfs_stat_64 attributes;
    struct statvfs volume;
    int result;
    bool opens; /* a file, to be closed again if nobody waits for it any more */
    bool done, abandoned;
    struct call *next;
};

static struct nfs_context *nfs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t handed_in = PTHREAD_COND_INITIALIZER;
static pthread_cond_t came_back = PTHREAD_COND_INITIALIZER;
static struct call *first, **last = &first;

/*
 * What the kernel knows of files. FUSE's kernel side would go by it when a file is opened: one that another node has
 * replaced within the last second would be read up to its old length. Two paths may share a place, of which one is then
 * asked for once more.
 */
enum { PLACES = 1 << 18 };
static struct known {
    uint64_t path, inode, size, mtime, mtime_ns;
} known[PLACES];

static void free_call(struct call *call)
{
    free(call->path);
    free(call->other_path);
    free(call->data);
    free(call);
}

/* A new call in the name of the process that FUSE is serving; NULL if there is no memory for it. */
static struct call *new_call(int (*make)(struct call *), const char *path)
{
    const struct fuse_context *context = fuse_get_context();
    struct call *call = calloc(1, sizeof *call);
    if (call == NULL)
        return NULL;
    call->make = make;
    call->pid = context->pid;
    call->uid = context->uid;
    call->gid = context->gid;
    if (path != NULL && (call->path = strdup(path)) == NULL) {
        free(call);
        return NULL;
    }
    return call;
}

/* The one thread that calls libnfs. */
static void *make_calls(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (first == NULL)
            pthread_cond_wait(&handed_in, &lock);
        struct call *call = first;
        if ((first = call->next) == NULL)
            last = &first;
        if (!call->abandoned) {
            pthread_mutex_unlock(&lock);
            nfs_set_uid(nfs, (int)call->uid);
            nfs_set_gid(nfs, (int)call->gid);
            int result = call->make(call);
            pthread_mutex_lock(&lock);
            call->result = result;
        }
        call->done = true;
        if (!call->abandoned) {
            pthread_cond_broadcast(&came_back);
            continue;
        }
        if (call->opens && call->file != NULL) {
            pthread_mutex_unlock(&lock);
            nfs_close(nfs, call->file);
            pthread_mutex_lock(&lock);
        }
        free_call(call);
    }
    return NULL;
}

/* The signals in one line of /proc/PID/status. */
static unsigned long long signals(const char *status, const char *name)
{
    const char *line = strstr(status, name);
    return line == NULL ? 0 : strtoull(line + strlen(name), NULL, 16);
}

/* Whether a process is about to end by a signal. FUSE tells of every one; the kernel's client stops for these only. */
static bool is_killed(pid_t pid)
{
    const unsigned long long harmless =
        1ull << (SIGCHLD - 1) | 1ull << (SIGCONT - 1) | 1ull << (SIGURG - 1) | 1ull << (SIGWINCH - 1);
    char text[4096];

    snprintf(text, sizeof text, "/proc/%d/status", (int)pid);
    FILE *file = fopen(text, "r");
    if (file == NULL)
        return true;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    const unsigned long long pending = signals(text, "\nSigPnd:") | signals(text, "\nShdPnd:");
    const unsigned long long withheld =
        signals(text, "\nSigBlk:") | signals(text, "\nSigIgn:") | signals(text, "\nSigCgt:");
    return (pending & ~withheld & ~harmless) != 0;
}

/* Hand a call in and wait for it. True: it came back, and is the caller's to free. False: the process was killed. */
static bool wait_for(struct call *call)
{
    bool done;

    pthread_mutex_lock(&lock);
    *last = call;
    last = &call->next;
    pthread_cond_signal(&handed_in);
    while (!call->done && !(fuse_interrupted() && is_killed(call->pid))) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&came_back, &lock, &until);
    }
    done = call->done;
    call->abandoned = !done;
    pthread_mutex_unlock(&lock);
    return done;
}

/* Make a call of which only the result is wanted. */
static int finish(struct call *call)
{
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    free_call(call);
    return result;
}

static struct nfsfh *handle(const struct fuse_file_info *file)
{
    return (struct nfsfh *)(uintptr_t)file->fh;
}

static void convert(const struct nfs_stat_64 *from, struct stat *to)
{
    memset(to, 0, sizeof *to);
    to->st_dev = from->nfs_dev;
    to->st_ino = from->nfs_ino;
    to->st_mode = from->nfs_mode;
    to->st_nlink = from->nfs_nlink;
    to->st_uid = from->nfs_uid;
    to->st_gid = from->nfs_gid;
    to->st_rdev = from->nfs_rdev;
    to->st_size = from->nfs_size;
    to->st_blksize = from->nfs_blksize;
    to->st_blocks = from->nfs_blocks;
    to->st_atim = (struct timespec){.tv_sec = from->nfs_atime, .tv_nsec = from->nfs_atime_nsec};
    to->st_mtim = (struct timespec){.tv_sec = from->nfs_mtime, .tv_nsec = from->nfs_mtime_nsec};
    to->st_ctim = (struct timespec){.tv_sec = from->nfs_ctime, .tv_nsec = from->nfs_ctime_nsec};
}

/* Note what the kernel is about to know of a file. True if it may know something else so far. */
static bool note(const char *path, const struct nfs_stat_64 *now)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const char *at = path; *at != '\0'; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    const struct known new = {hash, now->nfs_ino, now->nfs_size, now->nfs_mtime, now->nfs_mtime_nsec};
    struct known *place = &known[hash % PLACES];

    pthread_mutex_lock(&lock);
    bool differs = memcmp(place, &new, sizeof new) != 0;
    *place = new;
    pthread_mutex_unlock(&lock);
    return differs;
}

/* Below: for each of FUSE's operations what the calling thread does (call_), and what FUSE's thread does (do_). */

static int call_getattr(struct call *call)
{
    return nfs_lstat64(nfs, call->path, &call->attributes);
}

static int do_getattr(const char *path, struct stat *out, struct fuse_file_info *file)
{
    struct call *call = new_call(call_getattr, path);
    (void)file;
    if (call == NULL)
        return -ENOMEM;
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    if (result >= 0) {
        convert(&call->attributes, out);
        note(path, &call->attributes);
    }
    free_call(call);
    return result < 0 ? result : 0;
}

static int call_readdir(struct call *call)
{
    struct nfsdir *folder;
    struct nfsdirent *entry;
    int result = nfs_opendir(nfs, call->path, &folder);
    if (result < 0)
        return result;
    while ((entry = nfs_readdir(nfs, folder)) != NULL) {
        size_t length = strlen(entry->name) + 1;
        char *longer = realloc(call->data, call->size + length);
        if (longer == NULL) {
            nfs_closedir(nfs, folder);
            return -ENOMEM;
        }
        call->data = longer;
        memcpy(call->data + call->size, entry->name, length);
        call->size += length;
    }
    nfs_closedir(nfs, folder);
    return 0;
}

static int do_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags)
{
    struct call *call = new_call(call_readdir, path);
    (void)offset, (void)file, (void)flags;
    if (call == NULL)
        return -ENOMEM;
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    for (size_t at = 0; result >= 0 && at < call->size; at += strlen(call->data + at) + 1)
        fill(buffer, call->data + at, NULL, 0, 0);
    free_call(call);
    return result;
}

/* What is read comes into the call's own memory: the buffer of a process that was killed is gone. */
static int receive(struct call *call, char *buffer, size_t size)
{
    if (call == NULL)
        return -ENOMEM;
    call->size = size;
    if ((call->data = malloc(size)) == NULL) {
        free_call(call);
        return -ENOMEM;
    }
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    if (result >= 0)
        memcpy(buffer, call->data, size);
    free_call(call);
    return result;
}

static int call_readlink(struct call *call)
{
    return nfs_readlink(nfs, call->path, call->data, (int)call->size);
}

static int do_readlink(const char *path, char *buffer, size_t size)
{
    int result = receive(new_call(call_readlink, path), buffer, size);
    return result < 0 ? result : 0;
}

static int call_read(struct call *call)
{
    return nfs_pread(nfs, call->file, (uint64_t)call->offset, call->size, call->data);
}

static int do_read(const char *path, char *buffer, size_t size, off_t offset, struct fuse_file_info *file)
{
    struct call *call = new_call(call_read, NULL);
    (void)path;
    if (call != NULL) {
        call->file = handle(file);
        call->offset = offset;
    }
    return receive(call, buffer, size);
}

static int call_write(struct call *call)
{
    return nfs_pwrite(nfs, call->file, (uint64_t)call->offset, call->size, call->data);
}

static int do_write(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file)
{
    struct call *call = new_call(call_write, NULL);
    (void)path;
    if (call == NULL)
        return -ENOMEM;
    if ((call->data = malloc(size)) == NULL) {
        free_call(call);
        return -ENOMEM;
    }
    memcpy(call->data, data, size);
    call->size = size;
    call->offset = offset;
    call->file = handle(file);
    return finish(call);
}

static int call_open(struct call *call)
{
    int result = nfs_open(nfs, call->path, call->number, &call->file);
    if (result >= 0 && (result = nfs_fstat64(nfs, call->file, &call->attributes)) < 0) {
        nfs_close(nfs, call->file);
        call->file = NULL;
    }
    return result;
}

static int call_create(struct call *call)
{
    return nfs_open2(nfs, call->path, call->number, (int)call->size, &call->file);
}

/* `path`: of a file that was there before; NULL for one that is made. */
static int open_file(struct call *call, const char *path, struct fuse_file_info *file)
{
    call->opens = true;
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    if (result >= 0)
        file->fh = (uintptr_t)call->file;
    if (result >= 0 && path != NULL && note(path, &call->attributes))
        fuse_invalidate_path(fuse_get_context()->fuse, path);
    free_call(call);
    return result < 0 ? result : 0;
}

static int do_open(const char *path, struct fuse_file_info *file)
{
    struct call *call = new_call(call_open, path);
    if (call == NULL)
        return -ENOMEM;
    /* FUSE sends the offset with each write, O_APPEND or not. */
    call->number = file->flags & ~(O_CREAT | O_EXCL | O_APPEND);
    return open_file(call, path, file);
}

static int do_create(const char *path, mode_t mode, struct fuse_file_info *file)
{
    struct call *call = new_call(call_create, path);
    if (call == NULL)
        return -ENOMEM;
    call->number = (file->flags & ~O_APPEND) | O_CREAT;
    call->size = mode & 07777;
    return open_file(call, NULL, file);
}

static int call_fsync(struct call *call)
{
    return nfs_fsync(nfs, call->file);
}

static int call_close(struct call *call)
{
    nfs_close(nfs, call->file);
    return 0;
}

static int with_file(int (*make)(struct call *), struct fuse_file_info *file, off_t offset)
{
    struct call *call = new_call(make, NULL);
    if (call == NULL)
        return -ENOMEM;
    call->file = handle(file);
    call->offset = offset;
    return finish(call);
}

static int do_fsync(const char *path, int only_data, struct fuse_file_info *file)
{
    (void)path, (void)only_data;
    return with_file(call_fsync, file, 0);
}

static int do_release(const char *path, struct fuse_file_info *file)
{
    (void)path;
    return with_file(call_close, file, 0);
}

static int with_path(int (*make)(struct call *), const char *path, int number)
{
    struct call *call = new_call(make, path);
    if (call == NULL)
        return -ENOMEM;
    call->number = number;
    return finish(call);
}

static int with_paths(int (*make)(struct call *), const char *path, const char *other_path)
{
    struct call *call = new_call(make, path);
    if (call == NULL)
        return -ENOMEM;
    if ((call->other_path = strdup(other_path)) == NULL) {
        free_call(call);
        return -ENOMEM;
    }
    return finish(call);
}

static int call_unlink(struct call *call)
{
    return nfs_unlink(nfs, call->path);
}

static int do_unlink(const char *path)
{
    return with_path(call_unlink, path, 0);
}

static int call_mkdir(struct call *call)
{
    return nfs_mkdir2(nfs, call->path, call->number);
}

static int do_mkdir(const char *path, mode_t mode)
{
    return with_path(call_mkdir, path, mode & 07777);
}

static int call_rmdir(struct call *call)
{
    return nfs_rmdir(nfs, call->path);
}

static int do_rmdir(const char *path)
{
    return with_path(call_rmdir, path, 0);
}

static int call_rename(struct call *call)
{
    return nfs_rename(nfs, call->path, call->other_path);
}

static int do_rename(const char *from, const char *to, unsigned int flags)
{
    if (flags != 0)
        return -EINVAL; /* as the kernel's client */
    return with_paths(call_rename, from, to);
}

static int call_symlink(struct call *call)
{
    return nfs_symlink(nfs, call->path, call->other_path);
}

static int do_symlink(const char *target, const char *path)
{
    return with_paths(call_symlink, target, path);
}

static int call_link(struct call *call)
{
    return nfs_link(nfs, call->path, call->other_path);
}

static int do_link(const char *from, const char *to)
{
    return with_paths(call_link, from, to);
}

static int call_chmod(struct call *call)
{
    return nfs_lchmod(nfs, call->path, call->number);
}

static int do_chmod(const char *path, mode_t mode, struct fuse_file_info *file)
{
    (void)file;
    return with_path(call_chmod, path, mode & 07777);
}

/* libnfs always sets owner and group; -1 means "as it is". */
static int call_chown(struct call *call)
{
    int result = nfs_lstat64(nfs, call->path, &call->attributes);
    if (result < 0)
        return result;
    uid_t uid = call->new_uid == (uid_t)-1 ? (uid_t)call->attributes.nfs_uid : call->new_uid;
    gid_t gid = call->new_gid == (gid_t)-1 ? (gid_t)call->attributes.nfs_gid : call->new_gid;
    return nfs_lchown(nfs, call->path, (int)uid, (int)gid);
}

static int do_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *file)
{
    struct call *call = new_call(call_chown, path);
    (void)file;
    if (call == NULL)
        return -ENOMEM;
    call->new_uid = uid;
    call->new_gid = gid;
    return finish(call);
}

static int call_truncate(struct call *call)
{
    return nfs_truncate(nfs, call->path, (uint64_t)call->offset);
}

static int call_ftruncate(struct call *call)
{
    return nfs_ftruncate(nfs, call->file, (uint64_t)call->offset);
}

static int do_truncate(const char *path, off_t size, struct fuse_file_info *file)
{
    if (file != NULL)
        return with_file(call_ftruncate, file, size);
    struct call *call = new_call(call_truncate, path);
    if (call == NULL)
        return -ENOMEM;
    call->offset = size;
    return finish(call);
}

static int call_utimens(struct call *call)
{
    struct timespec now;
    struct timeval times[2];
    int result = nfs_lstat64(nfs, call->path, &call->attributes);
    if (result < 0)
        return result;
    const struct nfs_stat_64 *found = &call->attributes;
    const struct timespec old[2] = {
        {.tv_sec = (time_t)found->nfs_atime, .tv_nsec = (long)found->nfs_atime_nsec},
        {.tv_sec = (time_t)found->nfs_mtime, .tv_nsec = (long)found->nfs_mtime_nsec},
    };
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < 2; i++) {
        const struct timespec *time = &call->times[i];
        if (time->tv_nsec == UTIME_NOW)
            time = &now;
        else if (time->tv_nsec == UTIME_OMIT)
            time = &old[i];
        times[i] = (struct timeval){.tv_sec = time->tv_sec, .tv_usec = time->tv_nsec / 1000};
    }
    return nfs_lutimes(nfs, call->path, times);
}

static int do_utimens(const char *path, const struct timespec wanted[2], struct fuse_file_info *file)
{
    struct call *call = new_call(call_utimens, path);
    (void)file;
    if (call == NULL)
        return -ENOMEM;
    memcpy(call->times, wanted, sizeof call->times);
    return finish(call);
}

static int call_statfs(struct call *call)
{
    return nfs_statvfs(nfs, call->path, &call->volume);
}

static int do_statfs(const char *path, struct statvfs *out)
{
    struct call *call = new_call(call_statfs, path);
    if (call == NULL)
        return -ENOMEM;
    if (!wait_for(call))
        return -EINTR;
    int result = call->result;
    if (result >= 0)
        *out = call->volume;
    free_call(call);
    return result;
}

/* After fuse_main has gone into the background: threads do not survive that. */
static void *do_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
    pthread_t thread;
    (void)connection;
    if (pthread_create(&thread, NULL, make_calls, NULL) != 0)
        abort();
    config->use_ino = 1;
    config->attr_timeout = KEPT_SECONDS;
    config->entry_timeout = KEPT_SECONDS;
    config->negative_timeout = 0; /* a file that another node makes is seen at once: lookupcache=positive */
    config->auto_cache = 1;
    config->hard_remove = 1;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = do_init,
    .getattr = do_getattr,
    .readdir = do_readdir,
    .readlink = do_readlink,
    .open = do_open,
    .create = do_create,
    .read = do_read,
    .write = do_write,
    .fsync = do_fsync,
    .release = do_release,
    .unlink = do_unlink,
    .mkdir = do_mkdir,
    .rmdir = do_rmdir,
    .rename = do_rename,
    .symlink = do_symlink,
    .link = do_link,
    .chmod = do_chmod,
    .chown = do_chown,
    .truncate = do_truncate,
    .utimens = do_utimens,
    .statfs = do_statfs,
};

int main(int count, char **words)
{
    char text[4096];

    if (count != 6) {
        fprintf(stderr, "usage: nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS\n");
        return 1;
    }
    const char *server = words[1], *export = words[2], *folder = words[3], *flags = words[5];
    const int patience_ms = atoi(words[4]);

    nfs = nfs_init_context();
    if (nfs == NULL) {
        fprintf(stderr, "mount.nfs: out of memory\n");
        return 32;
    }
    snprintf(text, sizeof text, "nfs://%s%s?version=3&nfsport=%d&mountport=%d", server, export, NFS_PORT, MOUNT_PORT);
    struct nfs_url *url = nfs_parse_url_dir(nfs, text);
    if (url == NULL) {
        fprintf(stderr, "mount.nfs: %s:%s: %s\n", server, export, nfs_get_error(nfs));
        return 32;
    }
    if (patience_ms > 0)
        nfs_set_timeout(nfs, patience_ms);
    else
        nfs_set_autoreconnect(nfs, -1);
    if (nfs_mount(nfs, url->server, url->path) != 0) {
        fprintf(stderr, "mount.nfs: mounting %s:%s failed: %s\n", server, export, nfs_get_error(nfs));
        return 32; /* mount(8): mount failure */
    }
    snprintf(text, sizeof text, "-oallow_other,default_permissions,subtype=nfs,fsname=%s:%s%s%s", server, export,
             *flags ? "," : "", flags);
    /* A thread for each process that waits, and one that hears when they are killed. */
    char *arguments[] = {words[0], (char *)folder, text, "-omax_threads=1000", NULL};
    return fuse_main(4, arguments, &operations, NULL);
}
